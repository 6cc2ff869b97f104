"""What is the same in every generated module, in files of one idea each.

The emitter pastes their bodies (what stands below the line `# === body ===`) one after the other into each generated
module, word for word; here they are ordinary modules, linted, typed and tested as such.
"""

# The order in which the bodies are pasted: each file uses only the ones before it.
ORDER = ("layouts", "metrics", "inputs", "compute", "logits", "hidden", "loss")
