"""Weight transfer: how a policy version gets from the trainer into the engines.

The packages `trainer`, `orchestrator` and `inference` have a sub-package of the same name. All use these words:

- transfer: one version's way into engines, by files (`filesystem`) or between processes (`collective`)
- publish: write a complete version to `weights/vNNNNNN/`; announce: tell the orchestrator that it is available
- sender: a rank of the trainer; receiver: a worker of an engine
- session: one collective transfer, from all senders to the receivers of the engines that joined it
- catalogue: name, shape, dtype and sender of each tensor of a session, layer by layer
"""
