"""Training of drafters (arXiv 2607.05147, section 3.3): anchors and packed blocks, losses."""
