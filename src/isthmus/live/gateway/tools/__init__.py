"""Tool calling as text: how definitions, calls and results stand in a prompt, and how calls are read from an answer.

Pure: text and values in, values out.
"""
