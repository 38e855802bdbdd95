"""Sandboxes for programs of rollouts that run on the node itself, with bubblewrap.

`view` says what a sandbox sees, `limits` what it may use, `box` makes one and starts programs in it by way of `inside`,
`runtime` is what verifiers knows of it, `scripts` finds the Python of harnesses, `watch` stands in for control groups.
"""
