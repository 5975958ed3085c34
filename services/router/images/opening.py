"""Whether this router's model takes images, and what is needed if it does."""

from __future__ import annotations

from pathlib import Path

import deepseek_recipe as recipe
from epdserve.model.config import CONFIG_FILE, ModelConfig
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.fetcher import ImageFetcher
from epdserve.services.router.images.pictures import PictureDesk
from epdserve.services.router.tokenizer import RouterTokenizer


def open_pictures(model_dir: Path, settings: ImageSettings, tokenizer: RouterTokenizer) -> PictureDesk | None:
    """The desk for images, None with a model of text, or where no ``config.json`` tells what it takes.

    Raises:
        ConfigError: ``config.json`` is broken.
        ValueError: An entry of the allow-list, or the tokenizer has no place holder.
    """
    if not (model_dir / CONFIG_FILE).is_file():
        return None
    config = ModelConfig.from_directory(model_dir)
    if config.vision is None:
        return None
    return PictureDesk(
        config.vision,
        settings,
        ImageFetcher(settings),
        placeholder_id=tokenizer.marker_id(recipe.SpecialToken.Image.default_str()),
        image_token_id=config.image_token_id,
    )
