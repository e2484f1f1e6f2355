"""The values that settings may have."""
