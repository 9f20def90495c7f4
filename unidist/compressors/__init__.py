"""The compressors of the core: `none`, `fp16`, `bf16`."""
