// What JupyterLab does not do by itself for these notebooks. A prebuilt extension, written by hand: the container that module
// federation expects, without a build. JupyterLab shares its own modules, so nothing is bundled and nothing is fetched.
(() => {
  const CUDA = "text/x-cuda";

  // `.cu`, `.cuh` and cells that begin with %%kernel or %%region are coloured as C++.
  const highlighting = (languages, notebooks) => {
    languages.addLanguage({
      name: "CUDA",
      displayName: "CUDA",
      mime: CUDA,
      extensions: ["cu", "cuh"],
      load: async () => (await languages.getLanguage("C++")).support,
    });
    const colour = (panel, model) => {
      if (model.type !== "code") return;
      const python = panel.content.codeMimetype;
      const wanted = /^\s*%%(kernel|region)\b/.test(model.sharedModel.getSource()) ? CUDA : python;
      if (model.mimeType !== wanted && (wanted === CUDA || model.mimeType === CUDA)) model.mimeType = wanted;
    };
    notebooks.widgetAdded.connect((_, panel) => {
      const watched = new WeakSet();
      const all = () => {
        for (const { model } of panel.content.widgets) {
          if (!watched.has(model)) {
            watched.add(model);
            model.contentChanged.connect(() => colour(panel, model));
            model.mimeTypeChanged.connect(() => colour(panel, model)); // the kernel's language comes when it has started
          }
          colour(panel, model);
        }
      };
      panel.context.ready.then(() => {
        all();
        panel.content.model.cells.changed.connect(() => requestAnimationFrame(all));
      });
    });
  };

  // The text that a figure comes with ("alt" in the output's metadata, as nbconvert reads it) on the picture itself.
  const alternativeText = (rendermime, RenderedImage) => {
    class Described extends RenderedImage {
      async render(model) {
        await super.render(model);
        const image = this.node.querySelector("img");
        const words = model.metadata["image/png"]?.alt;
        if (image && words) image.alt = words;
      }
    }
    const mimeTypes = ["image/png"];
    rendermime.addFactory({ safe: true, mimeTypes, createRenderer: (options) => new Described(options) }, 80);
  };

  // Contrast of 4.5:1 for line numbers and code, on JupyterLab's light and dark page; words stay whole where output is wrapped.
  const STYLE = `
    .cm-editor .cm-gutters { color: #5c5c5c; }
    [data-jp-theme-light="true"] {
      --jp-mirror-editor-comment-color: #356b6b;
      --jp-mirror-editor-keyword-color: #00701a;
      --jp-mirror-editor-builtin-color: #00701a;
      --jp-mirror-editor-number-color: #00701a;
      --jp-mirror-editor-atom-color: #4a4ad0;
      --jp-mirror-editor-bracket-color: #66665a;
      --jp-mirror-editor-meta-color: #8a1cd1;
    }
    [data-jp-theme-light="false"] .cm-editor .cm-gutters { color: #b0b0b0; }
    [data-jp-theme-light="false"] {
      --jp-mirror-editor-comment-color: #6bb5b5;
      --jp-mirror-editor-bracket-color: #b5b58a;
      --jp-mirror-editor-meta-color: #cf8cff;
      --jp-mirror-editor-def-color: #64b5f6;
      --jp-mirror-editor-variable-2-color: #64b5f6;
    }
    /* Listings and X-rays come in colours that read on either page (helpers/ladder/show.py); where the page is known, in better ones. */
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#6f7a85"] { color: #59636e !important; }
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#a65bcf"] { color: #8f3fbb !important; }
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#b8651b"] { color: #8f4a0f !important; }
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#3d8a3d"] { color: #2c6e2c !important; }
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#2f80c8"] { color: #1f68a6 !important; }
    [data-jp-theme-light="true"] .jp-OutputArea pre span[style^="color:#808890"] { color: #5f676e !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#6f7a85"] { color: #8f9aa5 !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#a65bcf"] { color: #c593e3 !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#b8651b"] { color: #da8f4b !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#3d8a3d"] { color: #66b866 !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#2f80c8"] { color: #6aaeea !important; }
    [data-jp-theme-light="false"] .jp-OutputArea pre span[style^="color:#808890"] { color: #949ca4 !important; }
    .jp-OutputArea-output.jp-RenderedText pre { word-break: normal; overflow-wrap: anywhere; }
    @media print { .jp-OutputArea-output pre { white-space: pre-wrap; } }
  `;

  const modules = {
    "./extension": async (shared) => {
      const { IEditorLanguageRegistry } = await shared("@jupyterlab/codemirror");
      const { INotebookTracker } = await shared("@jupyterlab/notebook");
      const { IRenderMimeRegistry, RenderedImage } = await shared("@jupyterlab/rendermime");
      const plugin = {
        id: "flashattention-notebooks:plugin",
        description: "CUDA highlighting, alternative text of figures, and contrast.",
        autoStart: true,
        requires: [IEditorLanguageRegistry, INotebookTracker, IRenderMimeRegistry],
        activate: (_, languages, notebooks, rendermime) => {
          highlighting(languages, notebooks);
          alternativeText(rendermime, RenderedImage);
          document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
        },
      };
      return () => ({ __esModule: true, default: plugin });
    },
  };

  let scope;
  const shared = async (name) => (await Object.values(scope[name])[0].get())();
  const containers = (window._JUPYTERLAB = window._JUPYTERLAB || {});
  containers["flashattention-notebooks"] = {
    init: (given) => void (scope = given),
    get: (name) => modules[name](shared),
  };
})();
