"""Credentials are left out of what is written down, and ordinary code stays as it is."""

from __future__ import annotations

import pytest

from ampscope.trace.redaction import redacted

SECRET = "Zq7Rk2Wx9Lp4"
RANDOM = "aB3xK9mQ2vT7wL5zN8rY4pD6"


@pytest.mark.parametrize(
    "code",
    [
        f'scope = ampscope.watch(m, s, webhook="http://127.0.0.1:9/services/T0/B0/{SECRET}")',
        f'webhook=(\n    "https://hooks."\n    "slack.com/services/{SECRET}"\n)',
        f'webhook="https://hooks.slack.com/" + "services/{SECRET}"',
        f'watch(m, webhook=f"https://hooks.example/{{team}}/{SECRET}")',
        f'requests.post("https://hooks.slack.com/services/T0/{SECRET}", json=x)',
        f'x = load("https://me:{SECRET}@host/x.bin")',
        f'y = get("https://host/x?sig={SECRET}&a=1")',
        f'login("hf_{SECRET}")',
        f'client = OpenAI("sk-{SECRET}")',
        f't = "ghp_{SECRET}"',
        f'"xoxb-1234-{SECRET}"',
        "AKIAZQRKWXLPZQ7RK2WX",
        f"eyJhbGciOi.{SECRET}.abc",
        f'os.environ["WANDB_API_KEY"] = "{SECRET}"',
        f'os.environ.setdefault("HUB_TOKEN", "{SECRET}")',
        f"connect(password = '{SECRET}')",
        f'{{"Authorization": "Bearer {SECRET}"}}',
        f'hub_token: str = "{SECRET}"',
        f"get(url, auth=('me', '{SECRET}'))",
        f"open_session('{RANDOM}')",
        'check("d41d8cd98f00b204e9800998ecf8427e")',
        f"ConnectionError: host='h.example', port=443: Max retries exceeded with url: /services/T0/{RANDOM}",
    ],
)
def test_a_credential_is_left_out_and_marked(code: str) -> None:
    left = redacted(code)
    assert "...redacted" in left
    assert not any(secret in left for secret in (SECRET, RANDOM, "ZQ7RK2WX", "d41d8cd98f"))
    assert left.count("\n") == code.count("\n")


def test_what_is_left_is_recognised() -> None:
    code = 'scope = ampscope.watch(m, s, every=3, webhook="https://hooks.example/T0/x", dir="r")'
    assert redacted(code) == (
        'scope = ampscope.watch(m, s, every=3, webhook="https://hooks.example/...redacted", dir="r")'
    )


@pytest.mark.parametrize(
    "code",
    [
        "x = model.encoder.layers[0].self_attn.out_proj.weight_orig_v2",
        'y = torch.full((4, 8), 0x3ff, dtype=torch.float16, device="cuda:0")',
        'torch.load("checkpoints/run_2024_10_01/step10000/model.safetensors")',
        '"""Wav2Vec2ForSequenceClassificationWithHead: see https://arxiv.org/abs/1706.03762."""',
        'pad_token="<pad>", cls_token="[CLS]", bos_token = "<extra_id_10>", token="cls"',
        'key = "transformer.h.0.attn.c_attn.weight"',
        "attn(query, key, value, key_padding_mask=mask)",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEE",
        'open("/data/imagenet/ILSVRC2012_img_train.tar")',
        'watch(m, s, dir="s3://bucket/prefix/run-0012")',
        'from_pretrained("facebook/wav2vec2-large-960h-lv60-self")',
        'load_url("https://download.pytorch.org/models/resnet50-0676ba61.pth")',
        "self.layers = nn.ModuleList([Wav2Vec2BertEncoderLayer(config) for _ in range(4)])",
        'dtype = "torch.float8_e4m3fnuz"',
        "secret_mask = x > 0",
        "loss = ce(logits.view(-1, 32000), token.view(-1))",
        "_scalar_or_tuple_1_t: TypeAlias = T | tuple[T]",
        "from huggingface_hub import hf_hub_download",
        'hasattr(self, "hf_device_map")',
        "watch(m, s, auth=None, password=None, webhook=url)",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    ],
)
def test_ordinary_code_stays(code: str) -> None:
    assert redacted(code) == code
