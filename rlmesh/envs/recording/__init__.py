"""Episodes as pictures: a strip of frames, an animation or a video of what a policy does."""
