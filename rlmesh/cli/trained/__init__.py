"""Commands about trained models and the samples of a training."""
