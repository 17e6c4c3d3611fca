"""Chats, templates and tokenizers."""
