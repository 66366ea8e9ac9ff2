"""The example inputs that `from_pretrained` makes from a configuration, by kinds of models."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
inputs = pytest.importorskip("fmapper_adapters.torch.pretrained.inputs")

TEXT = {"input_ids": (2, 8), "attention_mask": (2, 8)}
VISION = {"image_size": 32}
SHAPES = {
    "LlamaForCausalLM": ({}, TEXT),
    "T5ForConditionalGeneration": ({}, {**TEXT, "decoder_input_ids": (2, 8)}),
    "CLIPModel": ({"vision_config": VISION}, {**TEXT, "pixel_values": (2, 3, 32, 32)}),
    "SiglipModel": ({"vision_config": VISION}, {**TEXT, "pixel_values": (2, 3, 32, 32)}),
    "BlipModel": ({"vision_config": VISION}, {**TEXT, "pixel_values": (2, 3, 32, 32)}),
    "ViltModel": ({"image_size": 32}, {**TEXT, "pixel_values": (2, 3, 32, 32)}),
    "ViTModel": ({"image_size": (32, 48), "num_channels": 1}, {"pixel_values": (2, 1, 32, 48)}),
    "VideoMAEModel": ({"num_frames": 4, **VISION}, {"pixel_values": (2, 4, 3, 32, 32)}),
    "LlavaForConditionalGeneration": ({"vision_config": VISION}, TEXT),
    "WhisperForConditionalGeneration": (
        {"max_source_positions": 50},
        {"input_features": (2, 80, 100), "decoder_input_ids": (2, 8)},
    ),
    "Speech2TextForConditionalGeneration": (
        {"input_feat_per_channel": 40},
        {"input_features": (2, 64, 40), "decoder_input_ids": (2, 8)},
    ),
    "Wav2Vec2ForCTC": ({}, {"input_values": (2, 16000)}),
    "Wav2Vec2BertModel": ({}, {"input_features": (2, 64, 160)}),
    "ASTModel": ({"max_length": 40}, {"input_values": (2, 40, 128)}),
    "EncodecModel": ({"audio_channels": 2}, {"input_values": (2, 2, 16000)}),
    "ClapModel": (
        {"audio_config": {"spec_size": 64, "num_mel_bins": 16}},
        {**TEXT, "input_features": (2, 1, 256, 16)},
    ),
    "SpeechT5ForTextToSpeech": ({}, {**TEXT, "decoder_input_values": (2, 8, 80)}),
    "Pix2StructForConditionalGeneration": (
        {"vision_config": {"patch_size": 4}},
        {"flattened_patches": (2, 16, 50), "decoder_input_ids": (2, 8)},
    ),
    "Blip2ForConditionalGeneration": (
        {"num_query_tokens": 5, "image_token_index": 7, "vision_config": VISION},
        {"input_ids": (2, 13), "attention_mask": (2, 13), "pixel_values": (2, 3, 32, 32)},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_example_inputs_have_the_media_that_a_model_takes(name):
    settings, wanted = SHAPES[name]
    cls = getattr(transformers, name)
    config = cls.config_class(**settings)
    model = SimpleNamespace(forward=cls.forward, config=config, dtype=torch.bfloat16)
    found = inputs.example_kwargs(model)
    shapes = {
        name: tuple(value.shape) for name, value in found.items() if "decoder_att" not in name
    }
    assert shapes == wanted
    for value in found.values():
        assert value.dtype in (torch.int64, torch.bfloat16)
