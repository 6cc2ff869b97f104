"""How long the command line takes beyond Python's own start, each run in a fresh process, in alternating rounds.

Shown are the median and the fastest run: on a machine that others use, the fastest is the work without their share.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "check grpo": ["check", "grpo"],
    "check geo_mis": ["check", "geo_mis"],
    "check dcpo": ["check", "dcpo"],  # the longest proof
    "build trm_max": ["build", "trm_max"],
    "show gspo": ["show", "gspo"],
    "list": ["list"],
}
LIBRARIES = "import numpy, pydantic, lark, yaml; pydantic.BaseModel"
ROUNDS = 7


def main() -> None:
    # As installed: modules are compiled once, not at every start.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:

        def run(args: list[str]) -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL, cwd=folder, env=env)
            return time.perf_counter() - start

        jobs = {"python": ["-c", "pass"], "importing numpy, pydantic, lark and yaml alone": ["-c", LIBRARIES]}
        jobs |= {f"lossdsl {name}": ["-m", "lossdsl", *args] for name, args in COMMANDS.items()}
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for args in jobs.values():
            run(args)
        for number in range(ROUNDS):
            for name in list(jobs)[:: 1 if number % 2 else -1]:
                times[name].append(run(jobs[name]))
    start = times.pop("python")
    middle, least = statistics.median(start), min(start)
    print(f"Python {platform.python_version()}, {ROUNDS} runs, less Python's own start ({middle * 1e3:.0f} ms)\n")
    print("| command | median, ms | fastest, ms |")
    print("|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {(statistics.median(values) - middle) * 1e3:.0f} | {(min(values) - least) * 1e3:.0f} |")


if __name__ == "__main__":
    main()
