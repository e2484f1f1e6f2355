"""The ways that weights take from process to process; `base` is the contract that all of them keep."""
