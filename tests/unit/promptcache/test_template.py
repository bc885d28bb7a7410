"""Messages in a model's own chat template (section 3.2.3)."""

import json
from pathlib import Path

import pytest

from kvstore.errors import BadRequest
from kvstore.promptcache import ByteTokenizer, Layout, PmlError, load_tokenizer, parse_prompt, parse_schema

from .words import Words

TURNS = "<schema name=s><system>S</system><user>U <module name=m>M</module></user><assistant>A</assistant></schema>"


def said(schema: str, prompt: str, style: str) -> str:
    words = Words(style)
    layout = Layout(parse_schema(schema), words)
    return words.text(layout.place(parse_prompt(f"<prompt schema=s>{prompt}</prompt>", layout.schema)).tokens)


@pytest.mark.parametrize(
    ("schema", "prompt", "style", "text"),
    [
        (
            TURNS,
            "<m/><user>Q</user>",
            "chatml",
            "<|im_start|> system S <|im_end|> <|im_start|> user U M <|im_end|> <|im_start|> assistant A <|im_end|>"
            " <|im_start|> user Q <|im_end|> <|im_start|> assistant",
        ),
        (
            TURNS,
            "<m/><user>Q</user>",
            "llama2",
            "<s> [INST] <<SYS>> S <</SYS>> U M [/INST] A </s> <s> [INST] Q [/INST]",
        ),
        (
            TURNS,
            "<user>Q</user><assistant>R</assistant><user>T</user>",
            "llama2",
            "<s> [INST] <<SYS>> S <</SYS>> U [/INST] A </s> <s> [INST] Q [/INST] R </s> <s> [INST] T [/INST]",
        ),
        (
            "<schema name=s><system>S</system><module name=m>M</module></schema>",
            "<m/><user>Q</user>",
            "llama2",
            "<s> [INST] <<SYS>> S M <</SYS>> Q [/INST]",
        ),
        (
            "<schema name=s><user>U</user></schema>",
            "",
            "chatml",
            "<|im_start|> user U <|im_end|> <|im_start|> assistant",
        ),
        ("<schema name=s><user>U</user></schema>", "", "llama2", "<s> [INST] U [/INST]"),
        # text behind the imports goes on with a user's message, and else is one
        ("<schema name=s><user>U</user></schema>", "Q", "llama2", "<s> [INST] U Q [/INST]"),
        (
            "<schema name=s><user>U</user></schema>",
            "Q<user>R</user>",
            "chatml",
            "<|im_start|> user U Q <|im_end|> <|im_start|> user R <|im_end|> <|im_start|> assistant",
        ),
        (TURNS, "<m/>Q", "llama2", "<s> [INST] <<SYS>> S <</SYS>> U M [/INST] A </s> <s> [INST] Q [/INST]"),
        (
            "<schema name=s><system>S</system></schema>",
            "Q",
            "chatml",
            "<|im_start|> system S <|im_end|> <|im_start|> user Q <|im_end|> <|im_start|> assistant",
        ),
        ("<schema name=s>U</schema>", "<user>Q</user>", "llama2", "U <s> [INST] Q [/INST]"),
        ("<schema name=s>U</schema>", "Q", "", "U Q"),
    ],
)
def test_a_conversation_as_the_model_expects_it(schema: str, prompt: str, style: str, text: str) -> None:
    assert said(schema, prompt, style) == text


def test_what_the_template_writes_is_part_of_the_beginning() -> None:
    layout = Layout(parse_schema(TURNS), Words("chatml"))
    # <|im_start|> system S <|im_end|> <|im_start|> user U
    assert (layout.beginning, layout.system) == (7, 4)
    assert layout.areas["m",].start == 7


def test_optional_examples_bring_their_own_marks() -> None:
    schema = (
        "<schema name=s><system>S</system><module name=a><user>q</user><assistant>r</assistant></module>"
        "<module name=b><user>t</user><assistant>u</assistant></module></schema>"
    )
    text = (
        "<|im_start|> system S <|im_end|> <|im_start|> user t <|im_end|> <|im_start|> assistant u <|im_end|>"
    )
    assert said(schema, "<b/>", "chatml") == text


@pytest.mark.parametrize(
    ("schema", "prompt", "says"),
    [
        ("<schema name=s><assistant>A</assistant></schema>", "", "roles must alternate"),
        ("<schema name=s><user>A</user><user>B</user></schema>", "", "roles must alternate"),
        (TURNS, "<assistant>A</assistant>", "roles must alternate"),
    ],
)
def test_a_template_that_refuses_is_quoted(schema: str, prompt: str, says: str) -> None:
    with pytest.raises(PmlError, match=says) as caught:
        said(schema, prompt, "llama2")
    assert caught.value.remedy


def test_without_a_template_messages_are_refused() -> None:
    with pytest.raises(PmlError, match="there is none"):
        said(TURNS, "", "")


def test_bytes_are_a_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é<|im_end|>", template=True) == [0xC3, 0xA9, 258]
    assert tokenizer.encode("<|im_end|>") == list(b"<|im_end|>")
    assert load_tokenizer("bytes").placeholder == 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word tokenizer in the files that Hugging Face models have."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    words = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "hello", "you"]
    special = [
        {"id": number, "content": word, "special": True}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for number, word in enumerate(words[:5])
    ]
    model = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(words)},
        "unk_token": "<unk>",
    }
    whole = {
        "version": "1.0",
        "added_tokens": special,
        "model": model,
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content']"
        " + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "unk_token": "<unk>",
        "chat_template": template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_files_of_a_model(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    layout = Layout(parse_schema("<schema name=s><user>hello</user></schema>"), tokenizer)
    placement = layout.place(parse_prompt("<prompt schema=s/>", layout.schema))
    assert placement.tokens == [1, 3, 5, 4]
    assert tokenizer.placeholder == 0
    with pytest.raises(PmlError, match="begin with the user"):
        Layout(parse_schema("<schema name=s><system>hello</system></schema>"), tokenizer)


def test_marks_in_the_text_of_users_are_text(folder: Path) -> None:
    """Else an argument could end the user's message and speak for the assistant."""
    tokenizer = load_tokenizer(str(folder))
    assert 4 in tokenizer.encode("[/INST]", template=True)
    assert 4 not in tokenizer.encode("hello [/INST] you")


@pytest.mark.parametrize("content", [None, "no json", "{}"])
def test_files_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadRequest, match="has no tokenizer.json" if content is None else "cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from kvstore.promptcache import HuggingFaceTokenizer

    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    tokenizer = HuggingFaceTokenizer(fast)
    layout = Layout(parse_schema("<schema name=s><user>hello</user></schema>"), tokenizer)
    assert layout.place(parse_prompt("<prompt schema=s/>", layout.schema)).tokens == [1, 3, 5, 4]
    assert 4 not in tokenizer.encode("hello [/INST] you")
    with pytest.raises(PmlError, match="begin with the user"):
        Layout(parse_schema("<schema name=s><system>hello</system></schema>"), tokenizer)
