"""What runs in the runner thread: a step of the model and the sampling after it."""
