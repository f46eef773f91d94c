"""Read recipes: closed schemas that name every fault at once.

Nothing below the pipeline knows of recipes: stages take plain values.
"""

from msa_lite.recipe.demo import Demo
from msa_lite.recipe.editor import recipe_schema, write_with_schema
from msa_lite.recipe.inputs import Columns, Data, Prompt
from msa_lite.recipe.load import (
    RecipeSource,
    TableSource,
    absolute_paths,
    copy_recipe,
    dump_recipe,
    given_paths,
    load_any,
    load_recipe,
    load_table_recipe,
    load_training,
    moved_paths,
    relative_paths,
    set_key,
)
from msa_lite.recipe.schema import Recipe
from msa_lite.recipe.scores import SETS, JudgeKeys
from msa_lite.recipe.shipped import check_new_file, find_recipe, shipped_recipes, shipped_tables, title_of
from msa_lite.recipe.table import TableRecipe, overrides_of
from msa_lite.recipe.training import TrainingRecipe

__all__ = [
    "SETS",
    "Columns",
    "Data",
    "Demo",
    "JudgeKeys",
    "Prompt",
    "Recipe",
    "RecipeSource",
    "TableRecipe",
    "TableSource",
    "TrainingRecipe",
    "absolute_paths",
    "check_new_file",
    "copy_recipe",
    "dump_recipe",
    "find_recipe",
    "given_paths",
    "load_any",
    "load_recipe",
    "load_table_recipe",
    "load_training",
    "moved_paths",
    "overrides_of",
    "recipe_schema",
    "relative_paths",
    "set_key",
    "shipped_recipes",
    "shipped_tables",
    "title_of",
    "write_with_schema",
]
