"""hybridge: an ahead-of-time graph compiler for hybrid LLMs (KDA + DSA + AttnRes + latent MoE)."""
