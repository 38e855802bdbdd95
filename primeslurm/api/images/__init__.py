"""Container images of Harbor tasks that come with a Dockerfile."""
