"""The drawings of notebook 21 say what they are given."""

import numpy as np
import pandas as pd

from helpers import draw_decode, schedule

PNG = b"\x89PNG"


def test_the_roofline_bounds_by_the_copy_or_by_the_product():
    figure = draw_decode.roofline({"one": 1, "many": 1000}, copy=4, matmul=700, device="A GPU")
    said = [t.get_text() for t in figure.axes[0].texts]
    assert said[:2] == ["one: 4 TFLOP/s at most, 0.6%", "many: 700 TFLOP/s at most, 100.0%"]
    assert "one: 4 TFLOP/s" in figure.in_words and "many: 700 TFLOP/s" in figure.in_words


def test_pieces_lie_where_the_schedule_has_them():
    run = schedule.run([10] * 3, places=2).assign(split=[0, 1, 2])
    figure = draw_decode.pieces({"3 splits": run}, 2, per_sm=1)
    (ax,) = figure.axes
    assert [(p.get_x(), p.get_y()) for p in ax.patches] == [(0, 0), (0, 1), (10, 0)]
    assert ax.get_title(loc="left") == "3 splits: 75% of the places at work"
    faces = [p.get_facecolor() for p in ax.patches]
    assert len(set(faces)) == 3 and [h.get_facecolor() for h in figure.legends[0].legend_handles[:3]] == faces
    named = [t.get_text() for t in figure.legends[0].get_texts()]
    assert named == ["piece 0", "piece 1", "piece 2", "all are done"]


def test_measured_points_are_drawn_beside_the_model():
    predicted = pd.DataFrame({"132 CTAs are enough": [0.3, 0.6, 0.9]}, index=[1, 2, 4])
    measured = pd.DataFrame({"splits": [4, 1], "of_copy": [0.8, 0.2], "device": "A GPU"})
    alone = draw_decode.bandwidth(predicted, 4, "title").axes[0]
    both = draw_decode.bandwidth(predicted, 4, "title", measured).axes[0]
    labels = [[t.get_text() for t in ax.get_legend().get_texts()] for ax in (alone, both)]
    assert labels == [["model: 132 CTAs are enough"], ["model: 132 CTAs are enough", "measured · A GPU"]]
    (line,) = [line for line in both.lines if line.get_label() == "measured · A GPU"]
    assert line.get_xydata().tolist() == [[1, 0.2], [4, 0.8]]
    assert "measured: at most 0.80, with 4" in both.figure.in_words


def test_a_block_table_paints_the_pages_of_each_sequence():
    table = np.array([[4, 0, 2], [5, 1, 1]])
    figure = draw_decode.block_table(table, [40, 16], page=16, pages=6)
    left, right = figure.axes
    hatched = [p for p in left.patches if p.get_hatch()]
    assert len(hatched) == 1 and round(hatched[0].get_width() / 0.92, 2) == 0.5  # 40 keys are 2.5 pages
    faces = [p.get_facecolor() for p in right.patches]
    assert faces[0] == faces[1] == faces[2] != faces[3] and faces[4] == faces[5] != faces[3]
    assert [t.get_text() for t in right.texts if t.get_text().isdigit()] == [str(p) for p in table.ravel()]
    assert [t.get_text() for ax in figure.axes for t in ax.texts if "…" in t.get_text()] == ["0…", "16…", "32…"]  # keys
    assert "sequence 0, 40 keys, on pages 4, 0, 2; sequence 1, 16 keys, on pages 5." in figure.in_words
    assert figure.png(dpi=40).startswith(PNG)
