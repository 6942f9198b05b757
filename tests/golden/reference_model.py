"""The other opinion: transformers' Llama over the weights that our loader reads, in float32."""

from transformers import LlamaConfig, LlamaForCausalLM

from plugins.model_loader import ModelLoader


def transformers_model(loader: ModelLoader) -> LlamaForCausalLM:
    """Build transformers' model and fill it with the loader's weights.

    Raises: ValueError: a weight is missing or left over.
    """
    config = loader.config()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    weights = {name: tensor.float() for name, tensor in loader.weights()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or (missing and missing != ["lm_head.weight"]):
        raise ValueError(f"weights do not fit transformers' model: missing {missing}, left over {unexpected}")
    model.tie_weights()
    model.train(False)
    return model
