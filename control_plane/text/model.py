"""Text to tokens and back, for one model.

Built from what the worker handed over, so that the control plane needs no model files. How a conversation becomes
a prompt is the business of `chat.py`, text that arrives token by token that of `detokenizer.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from control_plane.text.chat import ChatTemplate
from control_plane.text.detokenizer import Detokenizer
from control_plane.text.stop import StopStrings
from control_plane.text.stream import TextStream
from control_plane.text.typed_tokens import TypedTokens
from plugins.errors import FieldViolation, ModelFileBroken
from plugins.types import SamplingParams, TokenId, TokenizerBundle


class TextModel:
    """The tokenizer and the chat template of one model. Immutable; may be used from several threads.

    Holds the tokenizer twice: the plain one reads special tokens in a text as the letters that they are, the
    marking one reads them as special. A special token that a caller wrote never meets the marking one unbroken.
    Only the batch calls of `tokenizers` let other threads run: `encode` holds the interpreter for 0.4 s per MiB.
    """

    def __init__(self, plain: Tokenizer, marking: Tokenizer, template: ChatTemplate, bos: TokenId | None) -> None:
        self._plain = plain
        self._marking = marking
        self._template = template
        self._bos = () if bos is None else (bos,)
        added = plain.get_added_tokens_decoder()
        self._special = {
            TokenId(index): token.content for index, token in added.items() if token.special and token.content
        }
        self._special_ids = frozenset(self._special)
        self._typed_tokens = TypedTokens(self._special.values())

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle, now: Callable[[], datetime] = datetime.now) -> "TextModel":
        """Build it from the worker's tokenizer; `now` is for templates that write the date.

        Raises: ModelFileBroken: the tokenizer cannot be read, or a text should start with a token it does not have.
        """
        plain = _load(bundle.tokenizer_json)
        marking = _literal(plain)
        plain.encode_special_tokens = True
        bos = None
        if bundle.add_bos:
            index = plain.token_to_id(bundle.bos_token)
            if index is None:
                raise ModelFileBroken(f"prompts start with {bundle.bos_token!r}, which the tokenizer does not have")
            bos = TokenId(index)
        template = ChatTemplate(bundle.chat_template, bundle.bos_token, bundle.eos_token, now)
        return cls(plain, marking, template, bos)

    def encode(self, text: str) -> tuple[TokenId, ...]:
        """Turn plain text into a prompt. Special tokens in it stay text; "" gives the first token alone, or none."""
        return self._bos + self._encode_piece(text)

    def encode_pieces(self, texts: Sequence[str]) -> list[tuple[TokenId, ...]]:
        """Turn texts that are no prompts into tokens, each by itself: nothing is put before them."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(map(TokenId, encoding.ids)) for encoding in encodings]

    def variable_violations(self, template_kwargs: Mapping[str, Any]) -> list[FieldViolation]:
        """Tell which variables a caller may not give the chat template."""
        return self._template.variable_violations(template_kwargs)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[TokenId, ...]:
        """Turn a conversation into a prompt: JSON values, as the template expects them, each message with its role.

        The template's special tokens are special, those in any text of the caller's stay text.
        Raises: InvalidRequest: the model has no template, or its template refuses this.
        """
        rendered = self._template.render(messages, tools, template_kwargs, self._typed_tokens)
        if not rendered.break_mark:
            return _encode(self._marking, rendered.text)
        (encoding,) = self._marking.encode_batch([rendered.text], add_special_tokens=False)  # with offsets
        ids: list[TokenId] = []
        end = 0
        for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._special.get(TokenId(index))
            # An unknown character may give a special token too: only those that are written out are the template's.
            if token is not None and token in rendered.text[start:stop]:
                ids += self._encode_piece(rendered.text[end:start].replace(rendered.break_mark, ""))
                ids.append(TokenId(index))
                end = stop
        return (*ids, *self._encode_piece(rendered.text[end:].replace(rendered.break_mark, "")))

    def decode(self, token_ids: Sequence[TokenId], skip_special_tokens: bool = True) -> str:
        """Turn tokens into text, without the special ones if told so; bytes that are no character become U+FFFD."""
        (text,) = self._plain.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new decoder for one output stream. Without `skip_special_tokens` such tokens have text too."""
        return Detokenizer(self._plain, self._special_ids if skip_special_tokens else frozenset())

    def stream(self, sampling: SamplingParams) -> TextStream:
        """Return the text of one new output."""
        (stream,) = self.streams((sampling,))
        return stream

    def streams(self, samplings: Sequence[SamplingParams]) -> list[TextStream]:
        """Return the texts of all outputs of one request; its stop strings are made ready once."""
        stops = StopStrings(samplings[0].stop) if samplings[0].stop else None
        return [TextStream(self.detokenizer(each.skip_special_tokens), each, stops) for each in samplings]

    def tokenizer_json(self) -> str:
        """Return the tokenizer, which takes 30 ms for 49,152 tokens, for who reads it in another process."""
        return self._plain.to_str()

    def _encode_piece(self, text: str) -> tuple[TokenId, ...]:
        return _encode(self._plain, text)


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except ValueError as error:
        raise ModelFileBroken(f"the model's tokenizer cannot be read: {error}") from error
    tokenizer.no_truncation()  # a file may carry the settings of its training
    tokenizer.no_padding()
    return tokenizer


def _literal(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer, to find special tokens as they are written and not in what its normalizer makes of a text."""
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    return Tokenizer.from_str(json.dumps(tree))


def _encode(tokenizer: Tokenizer, text: str) -> tuple[TokenId, ...]:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return tuple(map(TokenId, encoding.ids))
