"""Trainings on responses that are in the data: supervised fine-tuning, preferences (DPO), reward models."""
