"""Config: typed dataclasses (`schema`), Hydra composition (`load`) and login-node checks (`checks`)."""
