"""Triton kernels of aioengine: one op a module, each with a torch reference that is its oracle and its CPU path.

The op `x` lives in the module of that name or topic: `x` (the dispatcher), `x_triton` (the launch), `x_ref` (the reference) and
`_x_kernel`. Import them from their modules; importing this package imports neither torch nor triton.
"""
