"""Sentence-transformers models of several families with random weights, so small that each is made in a second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS: Final = ["refund", "double", "charge", "rain", "sea", "tree", "river", "castle", "search", "query", "don't", "!"]
_SIZE: Final[dict[str, Any]] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    # With smaller weights, a random model gives nearly the same vector to every text.
    "initializer_range": 0.3,
}

Make = Callable[[Path], SentenceTransformer]


def bert(directory: Path) -> SentenceTransformer:
    """Make a model with 128 positions, mean pooling, a padding token in the middle of the vocabulary, and prompts."""
    tokenizer = _word_pieces(["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"], cls="[CLS]", sep="[SEP]")
    config = transformers.BertConfig(**_SIZE, max_position_embeddings=128, pad_token_id=4)
    body = _transformer(directory, transformers.BertModel(config), tokenizer, pad="[PAD]")
    return SentenceTransformer(
        modules=[body, Pooling(32, "mean"), Normalize()],
        device="cpu",
        prompts={"find": "search query: ", "other": "tree "},
        default_prompt_name="find",
    )


def mpnet(directory: Path) -> SentenceTransformer:
    """Make a model whose positions begin after the padding token's id. It has no token types and pools by the first token."""
    tokenizer = _word_pieces(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"], cls="<s>", sep="</s>")
    config = transformers.MPNetConfig(**_SIZE, max_position_embeddings=130, pad_token_id=1)
    body = _transformer(directory, transformers.MPNetModel(config), tokenizer, pad="<pad>", longest=100)
    return SentenceTransformer(modules=[body, Pooling(32, "cls")], device="cpu")


def roberta(directory: Path) -> SentenceTransformer:
    """Make a model whose positions begin after the padding token's id.

    It has byte-level tokens, max pooling and a dense module.
    """
    config = transformers.RobertaConfig(**_SIZE, max_position_embeddings=130, pad_token_id=1, type_vocab_size=1)
    body = _transformer(
        directory, transformers.RobertaModel(config), _bytes(["<s>", "<pad>", "</s>"]), pad="<pad>", longest=128
    )
    return SentenceTransformer(modules=[body, Pooling(32, "max"), Dense(32, 24)], device="cpu")


def xlm_roberta(directory: Path) -> SentenceTransformer:
    """Make a model whose positions begin after the padding token's id.

    It has byte-level tokens and pools by the first token.
    """
    config = transformers.XLMRobertaConfig(**_SIZE, max_position_embeddings=130, pad_token_id=1, type_vocab_size=1)
    body = _transformer(
        directory, transformers.XLMRobertaModel(config), _bytes(["<s>", "<pad>", "</s>"]), pad="<pad>", longest=128
    )
    return SentenceTransformer(modules=[body, Pooling(32, "cls")], device="cpu")


def gpt2(directory: Path) -> SentenceTransformer:
    """Make a model with causal attention. It would take token types for words, and its tokenizer makes none."""
    config = transformers.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=300, initializer_range=0.3)
    body = _transformer(directory, transformers.GPT2Model(config), _bytes(["<s>", "<pad>", "</s>"]), pad="<pad>")
    return SentenceTransformer(modules=[body, Pooling(32, "lasttoken")], device="cpu")


TINY: Final[dict[str, Make]] = {"bert": bert, "mpnet": mpnet, "roberta": roberta, "xlm_roberta": xlm_roberta, "gpt2": gpt2}


def save_tiny(name: str, directory: Path) -> SentenceTransformer:
    """Make a model and save it to ``directory / name``."""
    torch.manual_seed(1)
    model = TINY[name](directory / "parts").eval()
    model.save(str(directory / name), create_model_card=False)
    return model


def _transformer(
    directory: Path, model: transformers.PreTrainedModel, tokenizer: Tokenizer, *, pad: str, longest: int = 10**30
) -> Transformer:
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, model_max_length=longest).save_pretrained(directory)
    body: Transformer = Transformer(str(directory))
    return body


def _word_pieces(special: list[str], *, cls: str, sep: str) -> Tokenizer:
    letters = sorted(set("".join(WORDS)))
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    tokenizer = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _finish(tokenizer, special, cls, sep)


def _bytes(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return _finish(tokenizer, special, "<s>", "</s>")


def _finish(tokenizer: Tokenizer, special: list[str], cls: str, sep: str) -> Tokenizer:
    tokenizer.add_special_tokens(special)
    ids = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{cls} $A {sep}", special_tokens=ids)
    return tokenizer
