"""A run after its submission: status, cancel, resume, logs, attach, export."""
