"""What a run would build, and what that takes: jobs, bytes, memory and time, before anything runs."""
