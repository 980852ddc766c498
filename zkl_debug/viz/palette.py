"""Colours that stay apart for every common colour blindness (Okabe and Ito), and how kinds are drawn."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#D9D9D9"
DOT = "#8A8A8A"  # an equal row among others

#: kind -> (colour, hatch); the hatch carries the meaning where colour cannot.
KINDS: dict[str, tuple[str, str]] = {
    "equal": (GREY, ""),
    "masked": (SKY, ".."),
    "propagated": (ORANGE, "//"),
    "own": (VERMILION, ""),
    "uncaptured-state": (PURPLE, "xx"),
}

#: kind -> marker, for figures of single rows.
MARKERS: dict[str, str] = {"equal": ".", "masked": "o", "propagated": "s", "own": "X", "uncaptured-state": "P"}
