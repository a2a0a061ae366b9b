"""Trainings with the Trainer of transformers and with Accelerate."""
