"""The built-in roles of a training. Each is a small class, made for subclasses."""
