"""Dense model → 2:4-sparse, quantised weights: layer by layer, on the inputs that the compressed model gives."""

from spearfish.compress.methods import METHODS
from spearfish.compress.pipeline import Progress, compress
from spearfish.compress.recipe import Recipe
from spearfish.compress.report import LayerReport, Report

__all__ = ["METHODS", "LayerReport", "Progress", "Recipe", "Report", "compress"]
