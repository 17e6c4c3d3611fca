"""Images beside texts: a model's own processor of images (processor.py) and what a tower is told of them (tower.py).

model/vision_models.yaml says which models are trained on images, and where their parts stand.

Rows with images are read in data/.
"""
