"""The architectures of the zoo: those of some of transformers' own lists, and plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers.models.auto import modeling_auto as auto

from tests.zoo.plain.models import BY_NAME

LISTS: Mapping[str, Mapping[str, str | Sequence[str]]] = {
    "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked LM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "image segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "image-text contrastive": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech to text": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "speech recognition with CTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio classification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "multiple choice": auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "next sentence prediction": auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
    "video classification": auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    "speaker verification": auto.MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES,
    "audio frame classification": auto.MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES,
    "depth estimation": auto.MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES,
    "masked image modelling": auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES,
    "time series classification": auto.MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING_NAMES,
    "time series regression": auto.MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES,
    "time series forecasting": auto.MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES,
    "visual question answering": auto.MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES,
    "document question answering": auto.MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING_NAMES,
    "image-text to text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "table question answering": auto.MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING_NAMES,
}
"""transformers' lists by what the models are for."""

PLAIN = "plain PyTorch"
"""The task of models that are written by hand."""


def architectures() -> dict[str, str]:
    """Class names, each with the first list it is in; of several classes of a model the first."""
    found: dict[str, str] = {}
    for task, mapping in LISTS.items():
        for names in mapping.values():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, task)
    return found | dict.fromkeys(BY_NAME, PLAIN)
