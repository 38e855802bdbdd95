"""From a task to token sequences: workers, the token client, groups, the spool."""
