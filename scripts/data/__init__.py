"""Text and token files for trainings."""
