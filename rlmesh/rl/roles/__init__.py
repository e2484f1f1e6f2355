"""The built-in roles of a training. Each is a small class that can be inherited from."""
