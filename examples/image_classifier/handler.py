"""The image classifier that TorchServe ships, with the preprocessing EfficientNet-Lite expects.

The Lite networks were trained on pixels scaled to about [-1, 1], one mean and one deviation for all
channels, and on bicubic resizing. The stock handler uses ImageNet's means per channel and bilinear
resizing. All else (decoding, batching, softmax, names of the five best classes) is inherited.
"""

from torchvision import transforms
from ts.torch_handler.image_classifier import ImageClassifier


class EfficientNetLiteClassifier(ImageClassifier):
    """Top five ImageNet classes of a photo."""

    image_processing = transforms.Compose(
        [
            transforms.Lambda(lambda image: image.convert("RGB")),
            transforms.Resize(256, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[127 / 255] * 3, std=[128 / 255] * 3),
        ]
    )
