"""For programs that train on Amazon SageMaker: where the model and checkpoints go. See docs/sagemaker.md."""

from __future__ import annotations

from polyhvd.launch.sagemaker import checkpoint_dir, model_dir

__all__ = ["checkpoint_dir", "model_dir"]
