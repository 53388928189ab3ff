"""Config: typed dataclasses (`schema`), composition (`load`) and login-node checks (`checks`)."""
