"""The built-in task: a simulated support desk whose truth is known."""
