"""Curvature where people train: Hugging Face and timm-style models, Lightning, the Transformers Trainer."""
