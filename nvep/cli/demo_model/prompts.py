"""Prompts of the demo: openings of verses, the same whatever the number of ranks.

They were picked among openings whose continuation is never a close call: over 160 bytes the two most likely bytes stay
0.09 apart, in logits. Ranks that sum partial rows in another order, and devices whose exponential differs in the last
bit, move logits by up to 0.03, so they do not change the text. The demo prints the smallest distance that it saw.
"""

from __future__ import annotations

PROMPTS: tuple[bytes, ...] = (
    b"And Noah was six hundred years ",
    b"And those that were numbered of them by their families ",
    b"And thou shalt bring the Levites before the tabernacle of the ",
    b"O give thanks unto the LORD; ",
    b"And they made coats of fine linen of woven work for ",
    b"And while he yet spake, behold a multitude, ",
    b"And Pilate asked him, Art thou ",
    b"And I heard a voice ",
)
