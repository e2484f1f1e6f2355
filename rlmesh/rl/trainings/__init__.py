"""Trainings on responses that the data give: supervised fine-tuning, preferences, reward models."""
