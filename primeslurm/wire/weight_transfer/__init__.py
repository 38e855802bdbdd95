"""Weight transfer: how a policy version gets from the trainer into the engines. The same drawer is in every room.

- transfer: one version's way into engines; by files (`filesystem`), or from process to process (`collective`)
- publish: write a version into `weights/vNNNNNN/`, whole or not at all; announce: say that it can be had
- sender: a rank of the trainer; receiver: a worker of an engine
- session: one collective transfer, of all senders to the receivers of those engines that joined it
- catalogue: what a session sends: each tensor's name, shape, dtype and sender, layer by layer
"""
