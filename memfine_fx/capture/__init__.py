"""Capture: getting expert loops of an unmodified model into a graph, by means that are tried and taken back.

implementation   transformers' own switch between an eager expert loop and capturable spellings
flags            Dynamo's flags for data-dependent shapes, kept only where regions swallow all they let in
"""
