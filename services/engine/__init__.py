"""What every worker with a model has: step loop, runner, transfers; see README.md."""
