"""The folders of model and checkpoints on Amazon SageMaker. See ``polyhvd docs sagemaker``."""

from __future__ import annotations

from polyhvd.launch.sagemaker import checkpoint_dir, model_dir

__all__ = ["checkpoint_dir", "model_dir"]
