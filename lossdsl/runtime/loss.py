"""The module itself: parameters, entries, data side, compilation."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from .compute import _compute
from .hidden import _check_head, _default_bytes, _diagnose_head, _hidden_op
from .inputs import _check_ids, _check_rows, _diagnose, _read_counts, _read_inputs
from .layouts import Answers, div
from .logits import _check_inplace, _FromRows, _Rows
from .metrics import Output, Prepared, Weights

# === body ===


class _Known(torch.autograd.Function):
    """A scalar whose gradient is known: backward only scales it by what comes from above."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        loss, *gradients = known  # one for each input
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scale,), gradients = upstream, ctx.saved_tensors  # read once: a checkpoint unpacks them once
        free = scale.device.type == "cpu" and not torch.compiler.is_compiling()  # to look at its value
        unscaled = free and scale.item() == 1  # loss.backward(): the gradient is ready
        found = (g if unscaled else (scale * g).to(g.dtype) for g in gradients)
        return (None, *found)


class PolicyLoss(torch.nn.Module):
    """A policy-gradient loss from a spec.

        loss = - sum over live tokens of (lambda * objective + terms)

    lambda divides by counts (`n_tokens`, `n_seqs`, ...): those of this batch, or, given as `counts`, those of the whole
    optimiser step. The loss is a plain sum divided by them, so micro-batches and ranks add up to the whole, and nobody
    divides again (`rescale` is False).

    Args of the constructor:
        compile: use torch.compile (fullgraph, dynamic shapes); False runs the same code eagerly.
        debug: check values on any device; otherwise only where that costs no synchronisation (CPU).
        metrics: also compute metrics.
        on_missing: what a live NaN or infinite sampler log-prob means: "error"; "neutral", mu := prox (pi where the loss
            reads no prox); "drop", the token contributes nothing but is still counted.
        params: the loss's own parameters, also settable later as attributes.
    """

    name: ClassVar[str]
    spec_hash: ClassVar[str]
    PARAMS: ClassVar[dict[str, tuple[float | None, float | None, float | None, str]]]
    NEEDS: ClassVar[dict[str, str]]
    INPUTS: ClassVar[dict[str, str]]
    ADVANTAGES: ClassVar[str]
    TOPK: ClassVar[bool]
    LOCAL_STATISTICS: ClassVar[str | None]
    SUMS: ClassVar[tuple[str, ...]]  # the sums over the vocabulary that `weights` reads
    before: ClassVar[Callable[..., dict[str, Tensor]] | None] = None
    LEVEL: ClassVar[str] = (
        "batch"  # which tokens must be seen before a token's gradient is known: token, sequence, batch
    )
    weights: ClassVar[Callable[..., Weights]]
    live: ClassVar[Callable[..., Tensor] | None] = None
    distribution: ClassVar[Callable[..., dict[str, Tensor]] | None] = None
    d_distribution: ClassVar[Callable[..., Tensor] | None] = None
    centre: ClassVar[Callable[..., Tensor] | None] = None
    advantage: ClassVar[Callable[..., Tensor] | None] = None
    reward: ClassVar[Callable[..., Tensor] | None] = None
    kept: ClassVar[Callable[..., Tensor] | None] = None

    rescale: ClassVar[bool] = False
    _arguments: ClassVar[dict[str, tuple[str, ...]]]
    _compiled: ClassVar[dict[Any, Callable[..., Any]]]
    _pass_over: ClassVar[Callable[..., list[Tensor]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._compiled = {}
        cls._arguments = {}
        for part in (
            "before",
            "weights",
            "live",
            "distribution",
            "d_distribution",
            "centre",
            "advantage",
            "reward",
            "kept",
        ):
            function = getattr(cls, part, None)
            cls._arguments[part] = tuple(signature(function).parameters) if function is not None else ()
        cls._pass_over = _hidden_op(cls)

    def __init__(
        self,
        *,
        compile: bool = True,
        debug: bool = False,
        metrics: bool = True,
        on_missing: str = "error",
        **params: float,
    ) -> None:
        super().__init__()
        self.compiled, self.debug, self.metrics = compile, debug, metrics
        if on_missing not in ("error", "neutral", "drop"):
            raise ValueError(f'on_missing must be "error", "neutral" or "drop", not {on_missing!r}')
        self.on_missing = on_missing
        self._values: dict[str, float] = {}
        self._tensors: dict[Any, dict[str, Tensor]] = {}
        for key in params:
            if key not in self.PARAMS:
                near = difflib.get_close_matches(key, self.PARAMS, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.PARAMS) or 'none'}"
                raise TypeError(f"{self.name} has no parameter {key!r}; {hint}")
        for key, (default, _, _, doc) in self.PARAMS.items():
            if default is None and key not in params:
                raise TypeError(
                    f"{self.name} needs the parameter {key!r}, which has no published default{f': {doc}' if doc else ''}"
                )
            setattr(self, key, params.get(key, default))

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self.PARAMS:
            near = difflib.get_close_matches(key, self.PARAMS, 1, 0.8)
            if (
                near and "_tensors" in self.__dict__ and not hasattr(self, key)
            ):  # mistyped, it would be set and never read
                raise AttributeError(f"{self.name} has no parameter {key!r}; did you mean {near[0]!r}?")
            super().__setattr__(key, value)
            return
        _, low, high, _ = self.PARAMS[key]
        if isinstance(value, (str, bool)):
            raise TypeError(f"{key} must be a number, not {value!r}")
        number = float(value)
        if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
            raise ValueError(
                f"{key}={number:g} is outside [{-math.inf if low is None else low:g}, {math.inf if high is None else high:g}]"
            )
        self._values[key] = number
        self._tensors.clear()

    def __getattr__(self, key: str) -> Any:
        if key in type(self).PARAMS and "_values" in self.__dict__:
            return self._values[key]
        return super().__getattr__(key)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v:g}" for k, v in self._values.items())

    @property
    def needs(self) -> tuple[str, ...]:
        """The keyword inputs that a call must give, besides `mask`."""
        return tuple(self.NEEDS)

    # --- from log-probs ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        logp: Tensor,
        *,
        mask: Tensor,
        advantages: Tensor | None = None,
        counts: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> Output:
        """The loss from the sampled tokens' log-probs.

        Args:
            logp: [B, T], or [N] packed with `seq_ids`: log pi of each sampled token; its gradient is exact.
            mask: the same shape, bool or 0/1: which tokens are live.
            advantages: [B] or [B, T] (packed: [N]).
            counts: global counts of the optimiser step that lambda divides by, e.g. {"n_tokens": ...}.
            inputs: prox_logp, mu_logp, ref_logp and entropy like logp; groups [B] (packed: [N]), ids below B (N);
                seq_ids [N], ids below N; segment_ids like logp, numbered within their row (packed: in the whole row);
                and what the spec declares. What this loss does not need is ignored. A masked token of a packed batch
                may have a negative id: it belongs to no answer.

        Raises:
            TypeError: an input that is missing or unknown. ValueError: shapes, dtypes or values that do not fit.
        """
        if self.distribution is not None or self.centre is not None:
            wanted = [n for n in self.NEEDS if n.endswith("_logprobs")]
            if wanted or self.SUMS != ("entropy",):
                raise TypeError(
                    f"{self.name} reads the whole next-token distribution ({', '.join([*wanted, 'logits'])}): call from_logits"
                )
        given = _read_inputs(self, logp, "logp", mask, advantages, inputs)
        loss, gradients, metrics, _ = self._evaluate(logp, given, counts)
        tracked = [
            (x, gradients[k])
            for k, x in (("logp", logp), ("entropy", given.get("entropy")))
            if x is not None and k in gradients and x.requires_grad
        ]
        if tracked and torch.is_grad_enabled():
            xs, gs = zip(*tracked, strict=True)
            loss = _Known.apply((loss, *gs), *xs)  # type: ignore[no-untyped-call]
        return Output(loss, metrics)

    # --- from logits -------------------------------------------------------------------------------------------------------

    def from_logits(
        self,
        logits: Tensor,
        tokens: Tensor,
        *,
        mask: Tensor,
        advantages: Tensor | None = None,
        counts: Mapping[str, Any] | None = None,
        temperature: float | Tensor = 1.0,
        shift: bool = False,
        max_chunk_bytes: int | None = None,
        inplace: bool = False,
        **inputs: Any,
    ) -> Output:
        """The loss from logits.

        The gradient is closed: with D(v) = d value / d log pi(v), d loss / dz = -(D - pi * sum_v D(v)) / temperature.

        Args:
            logits: [B, T, V], or [N, V] packed with `seq_ids`; those at t score tokens at t (at t + 1 with `shift`).
            tokens: [B, T] or [N]: the sampled ids.
            temperature: that of the sampler: a number, or one per answer ([B]) or token (like `tokens`).
            shift: logits[t] scores tokens[t + 1], without a copy of the logits; every other input is aligned with
                `tokens`, and an answer's first position, which nothing scores, must not be live.
            max_chunk_bytes: bound on each float32 temporary (default 4 MiB on a CPU, 256 MiB elsewhere).
            inplace: backward writes the gradient over `logits`, which then hold it; autograd refuses where something else
                needs them again.
            inputs: as `forward`; the sampler's distribution as mu_logprobs [..., V], or as its top k:
                mu_topk_ids and mu_topk_logprobs [..., k], the rest being taken as mu(v) = gamma pi(v).

        Raises:
            TypeError, ValueError: as `forward`.
        """
        if logits.dim() != tokens.dim() + 1 or logits.shape[:-1] != tokens.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} must be tokens' shape {tuple(tokens.shape)} and the vocabulary"
            )
        given = _read_inputs(self, logits[..., 0], "logits", mask, advantages, inputs)
        _check_rows(given, logits.shape[-1], tokens, temperature, shift, self._checking(logits))
        if inplace:
            _check_inplace(logits)
        rows = _Rows(self, logits, tokens, temperature, shift, given, max_chunk_bytes, inplace)
        logp, sums, centre_value = rows.forward()
        loss, gradients, metrics, centre = self._evaluate(logp, given | sums, counts)
        if centre is not None:
            loss = loss + (centre * centre_value).sum()
        if logits.requires_grad and torch.is_grad_enabled():
            names, tensors = rows.saved(gradients, centre)
            loss = _FromRows.apply(loss, logits, rows, names, *tensors)  # type: ignore[no-untyped-call]
        return Output(loss, metrics)

    # --- from hidden states ------------------------------------------------------------------------------------------------

    def from_hidden(
        self,
        hidden: Tensor,
        lm_head_weight: Tensor,
        tokens: Tensor,
        *,
        mask: Tensor,
        advantages: Tensor | None = None,
        counts: Mapping[str, Any] | None = None,
        bias: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        vocab_size: int | None = None,
        shift: bool = False,
        max_logits_bytes: int | None = None,
        **inputs: Any,
    ) -> Output:
        """The loss from hidden states and the head: gradients come with the forward, and the logits are never stored.

        z = softcap * tanh(logit_scale * (hidden @ lm_head_weight.T + bias) / softcap) / temperature, in pieces of rows over
        the whole vocabulary; then, from each piece, d loss / dz as in `from_logits`, d hidden = dz @ lm_head_weight and
        d lm_head_weight = sum dz.T @ hidden (summed in float32). Backward only scales them. Rows that are masked are never
        computed; with `metrics=False` neither are those whose weight is known to be 0 (no advantage, rejected).

        Args:
            hidden: [B, T, H], or [N, H] packed with `seq_ids`; those at t score tokens at t (at t + 1 with `shift`).
            lm_head_weight: [V, H], of hidden's dtype or a wider one, in which the logits are kept; bias: [V].
            tokens: [B, T] or [N]: the sampled ids.
            logit_scale, softcap: what the model does to its logits before the softmax.
            vocab_size: how many of the V rows are tokens; padding rows beyond never get probability nor gradient.
            max_logits_bytes: bound on the one buffer of logits (default 256 MiB on a CPU, 1 GiB elsewhere).
            mask, advantages, counts, temperature, shift, inputs: as `from_logits`.

        Raises:
            TypeError, ValueError: as `forward`.
        """
        head = {"lm_head_weight": lm_head_weight} | ({} if bias is None else {"bias": bias})
        vocab = _check_head(hidden, head, tokens, vocab_size, logit_scale, softcap, max_logits_bytes)
        if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, head = hidden.to(dtype), {k: x.to(dtype) for k, x in head.items()}
        given = _read_inputs(self, hidden[..., 0], "hidden", mask, advantages, inputs)
        checking = self._checking(hidden)
        _check_rows(given, vocab, tokens, temperature, shift, checking)
        weight, bias = head["lm_head_weight"], head.get("bias")
        xs = (hidden, weight, bias)
        wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in xs]
        counted = _read_counts(self, counts, hidden[..., 0])
        tensors = {k: x.detach() for k, x in given.items()} | {f"count:{k}": x for k, x in counted.items()}
        if isinstance(temperature, Tensor) or temperature != 1:
            t = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device)
            tensors["temperature"] = t.detach()
        numbers = ({} if logit_scale == 1 else {"logit_scale": float(logit_scale)}) | (
            {} if softcap is None else {"softcap": float(softcap)}
        )
        options = f"{self.compiled} {self.metrics} {self.on_missing}"
        limit = _default_bytes(hidden.device) if max_logits_bytes is None else max_logits_bytes
        per_token, *gradients = self._pass_over(
            *(None if x is None else x.detach() for x in xs), tokens.detach(), list(tensors.values()), " ".join(tensors),
            list(self._values.values()), list(numbers.values()), " ".join(numbers), options, wanted, shift, vocab, limit,
        )  # fmt: skip
        if checking and not bool(torch.isfinite(per_token).all()):
            _diagnose_head(given["mask"], hidden, head, shift)
        logp, *others = (x.reshape(tokens.shape) for x in per_token.unbind())
        loss, _, metrics, centre = self._evaluate(logp, given | dict(zip(self.SUMS, others)), counted)  # noqa: B905
        if centre is not None:
            loss = loss + (centre * others[-1]).sum()
        if gradients:
            tracked = [x for x, w in zip(xs, wanted, strict=True) if w]
            loss = _Known.apply((loss, *gradients), *tracked)  # type: ignore[no-untyped-call]
        return Output(loss, metrics)

    # --- the data side -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        rewards: Tensor,
        groups: Tensor,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        **inputs: Any,
    ) -> Prepared:
        """Shaped rewards, advantages from them, and which answers to keep, [B] each.

        Args:
            rewards: [B] raw rewards. groups: [B] the prompt of each answer, any integers.
            lengths: [B] live tokens per answer (or give `mask`), where the spec reads `len`.

        Raises:
            ValueError: shapes, NaN rewards, a leave-one-out baseline over a single answer.
            TypeError: the spec states no advantage, or reads an input that is not given.
        """
        given = {"lengths": lengths, "mask": mask, **inputs}
        shaped = self.shape(rewards, groups, **given)
        return Prepared(self._data("advantage", shaped, groups, given), self.keep(rewards, groups, **given), shaped)

    def advantages(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """A of each answer, [B], from raw rewards (shaped first where the spec says so)."""
        return self._data("advantage", self.shape(rewards, groups, **inputs), groups, inputs)

    def shape(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """The shaped reward of each answer, [B]."""
        return rewards if self.reward is None else self._data("reward", rewards, groups, inputs)

    def keep(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """Whether each answer enters the batch, [B] bool."""
        return (
            torch.ones_like(rewards, dtype=torch.bool)
            if self.kept is None
            else self._data("kept", rewards, groups, inputs)
        )

    def _data(self, part: str, rewards: Tensor, groups: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        function = getattr(self, part)
        if function is None:
            raise TypeError(f"{self.name} states no {part}: its advantages come from you")
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [B]")
        R = rewards.to(torch.float64 if rewards.dtype is torch.float64 else torch.float32)
        if not bool(torch.isfinite(R).all()):
            raise ValueError("a reward is NaN or infinite: drop the answer or give it a reward")
        ax = Answers(torch.unique(groups, return_inverse=True)[1])
        size = ax.answers.count(R)
        if part == "advantage" and "ax" in self._arguments[part] and bool((size == 1).any()) and self._pools(part):
            warnings.warn(
                f"{self.name}: a group has one answer; a baseline over it is the answer's own reward, and its advantage 0",
                stacklevel=3,
            )
        mask, length = inputs.get("mask"), inputs.get("lengths")
        if length is None and mask is not None:
            length = mask.sum(-1)
        known: dict[str, Any] = {"ax": ax, "R": R, "group_size": size, "n_seqs": torch.tensor(float(R.numel())), "length": length,
                                 "n_groups": div(torch.ones_like(size), size).sum()} | self._tensors_on(R.device, R.dtype)  # fmt: skip
        known |= {k: v for k, v in inputs.items() if k in self.INPUTS}
        missing = [a for a in self._arguments[part] if known.get(a) is None]
        if missing:
            raise TypeError(
                f"{self.name} reads {', '.join('lengths' if m == 'length' else m for m in missing)} for its {part}"
            )
        found: Tensor = function(
            **{a: known[a].to(R) if a in ("length", *self.INPUTS) else known[a] for a in self._arguments[part]}
        )
        return found.expand(R.shape)

    def _pools(self, part: str) -> bool:
        names = getattr(self, part).__code__.co_names
        return any(name.endswith("_g") for name in names) and "loo_g" not in names

    # --- metrics -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def merge(metrics: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
        """The metrics of several micro-batches or ranks as one: sums and counts added, the largest of each "max"."""
        merged: dict[str, tuple[Tensor, Tensor]] = {}
        for found in metrics:
            for key, (total, count) in found.items():
                if key not in merged:
                    merged[key] = (total, count)
                elif key.endswith("max"):
                    merged[key] = (torch.maximum(merged[key][0], total), count)
                elif key in ("tokens", "answers"):
                    merged[key] = (merged[key][0] + total, count)
                else:
                    merged[key] = (merged[key][0] + total, merged[key][1] + count)
        return merged

    @staticmethod
    def summary(metrics: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Plain numbers, sum / count; adds X/ess, the effective sample size as a share, mean^2 / mean of squares."""
        found = {key: float(total) / float(count) if float(count) else 0.0 for key, (total, count) in metrics.items()}
        for key in [k for k in found if k.endswith("/mean_sq")]:
            mean, square = found[key.removesuffix("_sq")], found.pop(key)
            found[key.removesuffix("mean_sq") + "ess"] = mean * mean / square if square else 0.0
        return found

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _tensors_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters as 0-dim tensors: a changed value is new data, not a new program."""
        key = (device, dtype)
        if key not in self._tensors:
            self._tensors[key] = {k: torch.tensor(v, dtype=dtype, device=device) for k, v in self._values.items()}
        return self._tensors[key]

    def _checking(self, x: Tensor) -> bool:
        return (self.debug or x.device.type == "cpu") and not torch.compiler.is_compiling()

    def _evaluate(
        self, logp: Tensor, given: Mapping[str, Tensor], counts: Mapping[str, Any] | None, final: bool = True
    ) -> tuple[Tensor, dict[str, Tensor], Any, Tensor | None]:
        """(loss, d loss / d each of logp and the vocabulary sums, metrics, centring weight per token)."""
        checking = self._checking(logp)
        dtype = torch.float64 if logp.dtype is torch.float64 else torch.float32
        tensors = {
            k: v.detach() if v.requires_grad else v
            for k, v in given.items()
            if not k.endswith(("_logprobs", "topk_ids"))
        }
        tensors |= {f"count:{k}": v for k, v in _read_counts(self, counts, logp).items()}
        options = (self.metrics, checking, self.on_missing, "seq_ids" in given)
        if checking and final:
            _check_ids(given, logp)
        if self.compiled and not torch.compiler.is_compiling():
            tensors["mask"] = tensors["mask"].view(torch.uint8)
        params = self._tensors_on(logp.device, dtype)
        kernel = self._compile((*options, logp.dtype), lambda cls, *args: _compute(cls, options, *args))
        with torch.no_grad():  # one program, whatever the caller's mode
            loss, gradients, found, centre = kernel(logp.detach(), tensors, params)
        if checking and final and not math.isfinite(loss.item()):
            _diagnose(logp, tensors | {"mask": given["mask"]}, self.on_missing)
        return loss, gradients, found.pairs() if found else {}, centre

    def _compile(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(class, ...) for this class, compiled once per class and key unless `compile=False`."""
        cls = type(self)

        def kernel(*args: Any) -> Any:
            return function(cls, *args)

        if not self.compiled or torch.compiler.is_compiling():  # the caller compiles it with its own program
            return kernel
        if key not in cls._compiled:
            # torch.compile counts recompilations, and gives up at eight, per code object: each program gets its own.
            own = type(kernel)(kernel.__code__.replace(), globals(), "kernel", None, kernel.__closure__)  # type: ignore[misc]
            cls._compiled[key] = torch.compile(
                own, fullgraph=True, dynamic=True, options={"cpp.max_horizontal_fusion_size": 128}
            )
        return cls._compiled[key]
