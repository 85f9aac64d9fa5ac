"""The two runners: in-process, and mctl-runner."""
