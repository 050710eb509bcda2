"""Curvature where people train: Hugging Face, timm, Lightning, the Trainer of Transformers."""
