"""Files that outlive a process: joint checkpoints, the manifests that make them valid, and images of tasks."""
