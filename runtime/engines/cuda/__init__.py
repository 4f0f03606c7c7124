"""The torch CUDA executor: a round of captured graphs over state that stays on the device."""
